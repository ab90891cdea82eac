"""``python -m dflash_diag VERB``."""

from dflash_diag.cli import main

if __name__ == "__main__":
    main()
