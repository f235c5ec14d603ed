"""Bytes and counts, for a person."""


def in_words(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.2f} {unit}"


def count(number: int, noun: str, nouns: str | None = None) -> str:
    """Return ``number`` with ``noun`` or, unless it is 1, its plural: 1 window, 2,000 windows."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
