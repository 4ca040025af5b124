"""The aggregation of updates into a global model: arrays in, arrays out. No gRPC, no asyncio, no wall clock."""
