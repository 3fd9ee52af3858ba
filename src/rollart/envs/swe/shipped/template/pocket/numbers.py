"""Helpers for numbers and intervals."""

_ROMAN = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
          (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def roman(number):
    """1 to 3999 in Roman numerals."""
    if number < 1 or number > 3999:
        raise ValueError("only 1 to 3999")
    out = ""
    for value, letters in _ROMAN:
        while number >= value:
            out += letters
            number -= value
    return out


def digits(number, base):
    """The digits of a number from 0 on, the most significant first."""
    if base < 2:
        raise ValueError("base must be at least 2")
    out = [number % base]
    while number >= base:
        number = number // base
        out.append(number % base)
    return out[::-1]


def factors(number):
    """The prime factors, smallest first."""
    out, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            out.append(divisor)
            number = number // divisor
        divisor += 1
    if number > 1:
        out.append(number)
    return out


def median(numbers):
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    if not ordered:
        raise ValueError("no numbers")
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def union(intervals):
    """Overlapping or touching intervals (from, to) joined, in order."""
    out = []
    for low, high in sorted(intervals):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def clock(seconds):
    """Seconds as h:mm:ss, with a sign where they are negative."""
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    return f"{sign}{seconds // 3600}:{clock_part(seconds // 60)}:{clock_part(seconds)}"


def clock_part(units):
    """The part below sixty, with two digits."""
    rest = units % 60
    return "0" + str(rest) if rest < 10 else str(rest)
