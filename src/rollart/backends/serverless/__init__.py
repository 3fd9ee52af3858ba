"""Rewards behind a border: URLs, Lambda, the local elastic platform; and folders that deploy."""
