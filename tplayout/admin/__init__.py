"""What the command line tool does, as library calls: they print nothing, and report progress through a callback."""
