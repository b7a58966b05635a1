"""Saving and restoring: a folder that changes at once or not at all, arrays in chunks, trees as plain data, tables.

Nothing that is read back is executed: structures are JSON of a few known kinds, arrays are zarr files written by
tensorstore (the library below orbax; used directly because only parts of a buffer are written, in pieces).
"""
