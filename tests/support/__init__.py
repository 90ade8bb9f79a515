"""What tests share besides `hyper_parallel.testing`."""
