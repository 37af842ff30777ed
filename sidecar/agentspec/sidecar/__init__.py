"""Draft engine, its options and tags; later the gRPC service around it."""
