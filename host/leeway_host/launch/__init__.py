"""Running all services on one machine: processes, the live table, and what a run leaves behind."""
