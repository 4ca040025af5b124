"""Who is who: names in certificates, enrolment, and what is signed."""
