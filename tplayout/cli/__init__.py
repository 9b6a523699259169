"""The command line tool: one module a verb, which parses and prints; the work is in `tplayout.admin`."""
