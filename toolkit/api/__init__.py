"""The functions of `import toolkit` that do what commands do, with the same parameters.

A module a function, so that who uses one of them depends on no more. They import what they need when they are called:
`open` counts what its imports take.
"""
