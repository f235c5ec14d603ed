"""`launch verify`: is the accumulated gradient that of one big batch?"""
