"""Helpers for words."""


def wrap(text, width):
    """The text's words in lines of at most `width` characters; a longer word has a line of its own."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def caesar(text, shift):
    """Each letter moved on in the alphabet, round its end; all else as it is."""
    out = ""
    for letter in text:
        first = ord("A") if letter.isupper() else ord("a")
        if letter.isascii() and letter.isalpha():
            letter = chr((ord(letter) - first + shift) % 26 + first)
        out += letter
    return out


def distance(one, other):
    """How many letters to insert, delete or replace to turn one word into the other."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, against in enumerate(other, 1):
            cost = before + (letter != against)
            before, row[j] = row[j], min(cost, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def parse_pairs(text, separator=","):
    """`a=1, b=2` as a dictionary of texts; a name without a value is True, a later one wins."""
    out = {}
    for part in text.split(separator):
        name, found, value = part.partition("=")
        if name.strip():
            out[name.strip()] = value.strip() if found else True
    return out
