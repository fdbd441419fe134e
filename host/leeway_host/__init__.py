"""What runs on a person's machine: the command line, the local launcher, chaos, benchmarks, reports."""
