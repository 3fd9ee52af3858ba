"""Rewards behind a border: URLs, Lambda, the local elastic platform, Ray Serve; and folders that deploy."""
