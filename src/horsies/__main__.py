"""`python -m horsies` is the `horsies` command."""

from horsies.cli.main import main

if __name__ == "__main__":
    main()
