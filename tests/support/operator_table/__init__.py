"""Every operator of a framework's own list on distributed tensors, compared with one device: ``docs/operators.md``.

`side` says what the operators of a framework are and how to call them, `judge` tries them on the ranks of the test
pool, `exchange` is that pool, `table` drives it, `page` writes the table, `checks` is what the gates want of it.
"""
