"""The mesh of processes, collectives named by their effect, and the layers that are split over tensor-parallel ranks."""
