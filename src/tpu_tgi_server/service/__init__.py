"""gRPC lives here, and protobuf ends here: servers, servicers, conversion, errors and the life of the root process."""
