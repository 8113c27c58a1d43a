"""A module that exits when it is imported, as a script without `if __name__ == "__main__"` does."""

raise SystemExit("this is a script")
