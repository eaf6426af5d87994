// A provider of OpenID Connect on a free port: client credentials, tokens as JSON Web Tokens for one audience.
import { Provider } from "oidc-provider";
import { createServer } from "node:http";

const listener = createServer();
listener.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${listener.address().port}`;
  const provider = new Provider(issuer, {
    clients: [
      {
        client_id: "trainer",
        client_secret: "secret",
        grant_types: ["client_credentials"],
        redirect_uris: [],
        response_types: [],
      },
    ],
    features: {
      clientCredentials: { enabled: true },
      resourceIndicators: {
        enabled: true,
        defaultResource: () => "urn:remat",
        getResourceServerInfo: () => ({ audience: "remat", scope: "", accessTokenTTL: 300, accessTokenFormat: "jwt" }),
      },
    },
    extraTokenClaims: () => ({ groups: ["vision"] }),
  });
  listener.on("request", provider.callback());
  console.log(issuer);
});
