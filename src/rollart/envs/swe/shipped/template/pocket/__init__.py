"""Small helpers for lists, words, numbers and intervals."""
