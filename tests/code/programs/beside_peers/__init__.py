"""Times ops and whole steps beside other libraries: README.md says what is compared, and how."""
