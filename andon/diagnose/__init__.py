"""From findings to a first diagnosis: symptom class, leading failure family, default plan."""
