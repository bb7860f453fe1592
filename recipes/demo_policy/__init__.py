"""How the demonstration policy was made: scripted experts recorded in simulation, then pi0.5 at small size trained."""
