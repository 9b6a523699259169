"""Host staging: a shared region of chunk slots, the processes that move chunks, and the scheduler's view.

Layer: above storage and format, below the connectors. Imports no engine and no tensor library, since the I/O
processes load this package too and must stay small.
"""
