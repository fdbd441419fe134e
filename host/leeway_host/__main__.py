"""`python -m leeway_host`: the command `leeway`."""

from leeway_host.cli.app import main

if __name__ == "__main__":
    main()
