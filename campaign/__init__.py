"""The fault campaign: hundreds of seeded faults on live ranks, each judged by what the monitor says of it.

    make campaign                       # all, under half an hour on two cores
    make campaign ARGS="ddp fsdp2"      # one launch of four ranks for each of these topologies

`table` says what is put in and what must be said of it, `playing` trains with it, `reading` asks the
product, `judging` compares, `report` writes it down. Exit code 1 when a goal is missed.
"""
