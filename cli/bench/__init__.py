"""`tokenpod bench`: a load generator for `Generate`.

::

    command ── plan ──► fleet ──── one pipe each ────► worker (a process) ── client ──► server
       ▲                  │                               plans, asks, sends, notes times
       └── report, plots ◄┘ records of every request ◄──┘

A plan is all that a worker needs to make its share of the requests by itself: prompts and arrival
times are functions of (seed, level, request number), so that they are the same for any number of
processes. Workers note when each message came; every figure is derived from that afterwards.
"""
