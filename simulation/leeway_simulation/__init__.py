"""The three services in one process, under a seeded scheduler, in virtual time, against a real server."""
