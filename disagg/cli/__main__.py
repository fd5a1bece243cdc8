"""`python -m disagg.cli`."""

from disagg.cli.main import main

if __name__ == "__main__":
    main()
