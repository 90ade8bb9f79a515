"""`DTensor` and the functions that create and redistribute one. They use the framework only via
`hyper_parallel.platform`."""
