"""The messages of the contracts with engines: `.proto` sources and the code generated from them.

Only messages are generated. The services are a few lines of grpcio's generic API beside the code
that serves or calls them, so no `*_pb2_grpc.py` exists. `python -m pointsman.proto` generates anew;
do not edit `*_pb2.py` and `*_pb2.pyi`.
"""

__all__: list[str] = []
