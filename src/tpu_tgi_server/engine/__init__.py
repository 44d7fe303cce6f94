"""Requests become tokens here: slots, admission, stopping and text. It knows no gRPC and no processes."""
