"""Every operator of a framework's own list on distributed tensors, compared with one device: ``docs/operators.md``.

`side` lists the operators of a framework and how to call them. `judge` tries them on the ranks of the test pool, and
`exchange` is that pool. `table` drives it, `page` writes the table, and `checks` has the requirements of the gates.
"""
