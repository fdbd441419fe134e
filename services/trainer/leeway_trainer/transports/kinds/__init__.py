"""The built-in weight transports; a module's name is what `weights.transport` takes."""
