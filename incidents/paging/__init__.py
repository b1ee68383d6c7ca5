"""Waking people: what must page, whom, over which channels, until somebody has it.

`models` rows, `ladder` the operator's file of channels and steps, `asking` the one line others call,
`raising` which pages there must be, `escalating` when whom, `sending` one message over one channel
(`channels`), `texts` the words, `on_call` who has the pager, `deadman` what pages when no worker lives.
"""
