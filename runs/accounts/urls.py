"""Pages of accounts. Names in `account_`, `mfa_`, `openid_` and `socialaccount_` are allauth's."""

from django.urls import path

from runs.accounts import entering, mail_pages, mine, projects, sessions

urlpatterns = [
    path("sign-in", entering.sign_in, name="account_login"),
    path("sign-in/challenge", entering.challenge, name="sign_in_challenge"),
    path("sign-in/passkey", entering.by_passkey, name="sign_in_passkey"),
    path("sign-in/second-step", entering.second_step, name="mfa_authenticate"),
    path("sign-in/lost", mail_pages.lost, name="lost_password"),
    path("sign-in/lost/<str:key>", mail_pages.lost_link, name="lost_password_link"),
    path("sign-in/cancelled", entering.sso_cancelled, name="socialaccount_login_cancelled"),
    path("sign-in/<slug:provider_id>/go", entering.sso, name="openid_connect_login"),
    path("sign-in/<slug:provider_id>/callback", entering.sso_callback, name="openid_connect_callback"),
    path("sign-out", entering.sign_out, name="account_logout"),
    path("invitations/<str:token>", entering.invitation, name="invitation"),
    path("account", mine.account, name="account"),
    path("account/prove", mine.prove, name="prove"),
    path("account/challenge", mine.challenge, name="challenge"),
    path("account/password", mine.password, name="password"),
    path("account/mail", mail_pages.address, name="mail_address"),
    path("account/mail/<str:key>", mail_pages.confirm, name="confirm_mail"),
    path("account/sessions", sessions.page, name="sessions"),
    path("account/passkeys/add", mine.add_passkey, name="add_passkey"),
    path("account/passkeys/options", mine.passkey_options, name="passkey_options"),
    path("account/passkeys/<int:passkey_id>", mine.passkey, name="passkey"),
    path("account/codes", mine.codes, name="codes"),
    path("account/recovery-codes", mine.recovery_codes, name="recovery_codes"),
    path("account/sso/unlink", mine.unlink_sso, name="unlink_sso"),
    path("account/tokens", mine.my_tokens, name="my_tokens"),
    path("projects/<slug:project>/people", projects.people, name="people"),
    path("projects/<slug:project>/hooks", projects.hook_tokens, name="hook_tokens"),
    path("projects/<slug:project>/secrets", projects.secrets, name="secrets"),
    path("projects/<slug:project>/log", projects.log, name="account_log"),
    path("runs/<slug:slug>/secrets", projects.run_secret, name="run_secret"),
]
