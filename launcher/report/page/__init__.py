"""The report as one page for the browser: its plots, and the template that holds them."""
