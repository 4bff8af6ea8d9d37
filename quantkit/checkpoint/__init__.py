"""Model folders: reading any of them, writing new ones, and where they came from."""
