"""`andon ledger verify FILE`: check an exported ledger without the server.

Exit 0: every row fits; 1: some do not; 2: the file cannot be read.
"""

import argparse
import sys
from pathlib import Path

from andon.ledger import Chain
from andon.ledger_files import Unreadable, read

EXIT_VERIFIED, EXIT_FAILED, EXIT_UNREADABLE = 0, 1, 2
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the file, and the newest digest it must end with."""
    parser.add_argument("what", choices=["verify"], help="verify: recompute the chain")
    parser.add_argument("file", type=Path, help="an exported ledger: .csv, .json or .parquet")
    parser.add_argument("--head", help="digest of the newest row, as the server shows it")


def run(args: argparse.Namespace) -> int:
    """Check the file; say what is wrong, or how many rows fit."""
    chain = Chain()
    try:
        for row in read(args.file):
            chain.take(row)
    except (OSError, Unreadable, ImportError) as error:
        sys.stderr.write(f"andon ledger: {error}\n")
        return EXIT_UNREADABLE
    wrong = chain.wrong
    if args.head and chain.head != args.head.lower():
        wrong = [
            *wrong,
            f"the newest row is {chain.head or 'none'}, not {args.head}: rows were cut off or added",
        ]
    if wrong:
        sys.stderr.writelines(f"{line}\n" for line in wrong[:_SHOWN])
        sys.stderr.write(f"broken: {len(wrong)} faults in {chain.rows} rows\n")
        return EXIT_FAILED
    sys.stdout.write(f"verified: {chain.rows} rows, newest {chain.head or 'none'}\n")
    if not args.head:
        sys.stdout.write("not compared with the server's newest row (--head): a cut end would not show\n")
    return EXIT_VERIFIED
