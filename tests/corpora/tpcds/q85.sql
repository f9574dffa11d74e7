-- Web returns by reason: two disjunctions, one over a table that is read twice.
select
  substr(r_reason_desc, 1, 20) as reason, avg(ws_quantity) as quantity,
  avg(wr_refunded_cash) as cash, avg(wr_fee) as fee
from web_sales
join web_returns on wr_item_sk = ws_item_sk and wr_order_number = ws_order_number
join web_page on wp_web_page_sk = ws_web_page_sk
join customer_demographics as refunded on refunded.cd_demo_sk = wr_refunded_cdemo_sk
join customer_demographics as returning on returning.cd_demo_sk = wr_returning_cdemo_sk
join customer_address on ca_address_sk = wr_refunded_addr_sk
join date_dim on d_date_sk = ws_sold_date_sk
join reason on r_reason_sk = wr_reason_sk
where d_year = 2000
  and refunded.cd_marital_status = returning.cd_marital_status
  and refunded.cd_education_status = returning.cd_education_status
  and (
    (refunded.cd_marital_status = 'M' and refunded.cd_education_status = 'Advanced Degree'
      and ws_sales_price between 100.00 and 150.00)
    or (refunded.cd_marital_status = 'S' and refunded.cd_education_status = 'College'
      and ws_sales_price between 50.00 and 100.00)
    or (refunded.cd_marital_status = 'W' and refunded.cd_education_status = '2 yr Degree'
      and ws_sales_price between 150.00 and 200.00)
  )
  and ca_country = 'United States'
  and (
    (ca_state in ('IN', 'OH', 'NJ') and ws_net_profit between 100 and 200)
    or (ca_state in ('WI', 'CT', 'KY') and ws_net_profit between 150 and 300)
    or (ca_state in ('LA', 'IA', 'AR') and ws_net_profit between 50 and 250)
  )
group by r_reason_desc
order by reason, quantity, cash, fee
limit 100
