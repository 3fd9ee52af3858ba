"""Bug-fix tasks: made by mutation, verified by tests, played and scored in a sandbox."""
