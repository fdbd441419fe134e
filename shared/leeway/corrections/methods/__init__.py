"""The corrections, one module each: settings, formula and loss of a method. Each module ends in METHOD.

To add one, add a module here, or an entry point of the group `leeway.corrections` in a package of your own.
"""
