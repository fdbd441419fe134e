"""The built-in weight transports: one module each, which defines TRANSPORT."""
