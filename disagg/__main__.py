"""`python -m disagg`."""

from disagg.cli.__main__ import main

if __name__ == "__main__":
    main()
