"""The local training of one client in one process: FedAvg, FedProx, FedNova, SCAFFOLD, local layers."""
