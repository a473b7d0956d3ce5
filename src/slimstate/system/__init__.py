"""What any program needs: errors, progress, atomic output, processes, threads, the hub. Knows nothing about models."""
