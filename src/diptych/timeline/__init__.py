"""What workers did over time, from their events: who decodes, and lanes for Perfetto. Used live and by simulations."""
