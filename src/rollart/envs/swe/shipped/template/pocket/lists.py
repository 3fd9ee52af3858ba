"""Helpers for lists."""


def chunks(items, size):
    """Cut a list into pieces of `size`; the last one may be shorter."""
    if size < 1:
        raise ValueError("size must be at least 1")
    return [items[start:start + size] for start in range(0, len(items), size)]


def rotate(items, steps):
    """The list turned to the left by so many places."""
    if not items:
        return []
    steps = steps % len(items)
    return items[steps:] + items[:steps]


def merge(left, right):
    """Two sorted lists as one sorted list."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    return out + left[i:] + right[j:]


def search(items, wanted):
    """Where `wanted` stands in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def runs(items):
    """Equal neighbours as [item, how many]."""
    out = []
    for item in items:
        if out and out[-1][0] == item:
            out[-1][1] += 1
        else:
            out.append([item, 1])
    return out
