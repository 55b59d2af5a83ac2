"""`tokenpod bench`: a load generator for `Generate`.

    command ── plan ──► fleet ──── one pipe each ────► worker (a process) ──► server
       └── report, plots ◄┘ records of every request ◄──┘

Prompts and arrival times are functions of the plan and the request's number, so that they are the
same for any number of processes. Workers note when each message came; every figure is derived.
"""
