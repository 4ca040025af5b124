"""How updates become a global model. Arrays in, arrays out: no grpc, no asyncio, no wall clock."""
