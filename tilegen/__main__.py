"""The command line, as `python -m tilegen`."""

from tilegen.cli.main import main

if __name__ == "__main__":
    main()
