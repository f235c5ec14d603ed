"""Bytes, for a person."""


def in_words(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.2f} {unit}"
