"""One module per peer, each with the functions of ``benchmarks.peers.adapter.Adapter``."""
